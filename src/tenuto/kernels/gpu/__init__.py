"""Kernels for CUDA devices, in Triton (Tillet et al., MAPL 2019). They read lengths, page tables and row ids from
device memory, and their launch grids depend on shapes alone, so that a captured graph stays right when these change."""
