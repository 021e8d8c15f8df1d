"""Collectives behind one narrow seam: alone, over a torch process group, wrapped to record or to fail."""
