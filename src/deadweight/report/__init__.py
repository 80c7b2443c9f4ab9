"""Results as terminal reports, JSON, Markdown pages and figures."""
