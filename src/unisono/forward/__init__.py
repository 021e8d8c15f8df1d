"""How a model's forward runs: in which precision, compiled, and what it keeps for the backward pass."""
