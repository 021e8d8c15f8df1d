"""The arithmetic that makes runs equal: seeds, the order of additions, the flat layout, digests."""
