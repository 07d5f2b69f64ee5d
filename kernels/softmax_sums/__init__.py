"""Numbers of each row of logits that a cross entropy is made of: its largest, its sum of exponentials, its target's."""
