"""Plans: what runs of other sizes would do, from a bench and what is assumed."""
