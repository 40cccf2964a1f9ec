"""Implementations that say most plainly what is computed; masked dense attention is the oracle of all others."""
