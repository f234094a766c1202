"""How kernels are launched: settings by shape, dependent launches, fast launches."""
