"""Workers of real frameworks, and of scripts that behave like them."""
