"""Transfer of blocks between pools: shared memory, CUDA IPC or TCP, and the KvTransfer service."""
