"""Built-in recipes, on real data that ships with Python or with a package. Copy one to start your own."""
