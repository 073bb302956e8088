"""Commands that look back at runs: where the time went, what differs, and pages to read and to send."""
