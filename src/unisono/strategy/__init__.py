"""How memory and work are split over ranks: each strategy gives the same bits."""
