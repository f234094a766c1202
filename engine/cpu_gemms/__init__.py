"""The GEMMs of CPU libraries: oneDNN's over weights in its order, FBGEMM's in float16 for logits in float32."""
