"""Results as one self-contained HTML page each, and as fragments for notebooks."""
