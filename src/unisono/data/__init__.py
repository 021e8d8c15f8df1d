"""Which sample comes when, who computes it, and how it gets there."""
