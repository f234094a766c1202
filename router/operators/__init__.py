"""Routes by which operators change a cluster: who may use them."""
