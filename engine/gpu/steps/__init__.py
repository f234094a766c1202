"""Steps on the device: inputs, the state that stays between steps, samples, graphs of whole steps."""
