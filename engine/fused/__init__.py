"""Checkpoints that store weights otherwise than models ask for them: several in one tensor, as Phi-3 has them."""
