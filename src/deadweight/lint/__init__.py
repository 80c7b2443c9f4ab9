"""The audit as a check: settings in pyproject.toml, accepted findings, a baseline."""
