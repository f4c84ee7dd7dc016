"""Plans: predictions for runs of other sizes, from a bench and assumptions."""
