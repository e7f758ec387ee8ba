"""Messages that are kept aside for good, with all there is to know of them."""
