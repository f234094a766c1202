"""Transfer of blocks between pools: shared memory, CUDA IPC, NCCL, NIXL or TCP, and the KvTransfer service."""
