"""A run: what is settled before it, the record of it, its folder, and the density that it learned."""
