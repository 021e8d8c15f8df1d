"""What a person sees of a run: times, records, and where they go."""
