"""Dead letters: messages that are kept, with all there is to know of them."""
