"""What at least three folders need: settings, errors, RPC set-up, logging, metrics. Never torch."""
