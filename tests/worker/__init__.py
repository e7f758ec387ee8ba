"""Workers made with the SDK, run as the processes they are."""
