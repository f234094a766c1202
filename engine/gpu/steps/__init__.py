"""Steps on the device: inputs, the state that stays between steps, graphs of whole steps."""
