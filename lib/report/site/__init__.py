"""The static site: what goes in, made harmless, linked and built by Sphinx."""
