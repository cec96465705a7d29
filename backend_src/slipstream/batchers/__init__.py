"""The baselines' batching policies, on the same runner as the continuous scheduler."""
