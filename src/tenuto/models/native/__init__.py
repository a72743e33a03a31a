"""Models as operations of the native kernels."""
