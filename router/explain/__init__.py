"""Why a request went where it went, and how long each part of it took."""
