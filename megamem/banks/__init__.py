"""Tables that memory layers read, by lookups that controls and shuffled rows change."""
