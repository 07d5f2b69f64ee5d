"""Parts that commands share: their options and words, a run's record and status, ranks, drawings."""
