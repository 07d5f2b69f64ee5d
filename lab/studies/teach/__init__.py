"""Facts that are taught to a trained model, by every way of training it, and what it still knows afterwards."""
