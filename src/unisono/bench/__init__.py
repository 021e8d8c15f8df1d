"""What a step costs: unisono beside what a user would pick instead, measured in turn in one run."""
