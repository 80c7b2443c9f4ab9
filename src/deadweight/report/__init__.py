"""What people and programs read: the terminal report, the JSON report and the law pages."""
