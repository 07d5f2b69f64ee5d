"""`megamem analyse`: what the papers of token tables look at in trained models, a command, a table and a page each."""
