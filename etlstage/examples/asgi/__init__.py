"""An HTTP service whose requests are answered by workers."""
