"""What the tests of the NPU's driver share."""
