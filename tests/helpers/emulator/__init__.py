"""What the tests of the emulated CANN share."""
