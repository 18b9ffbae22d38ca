"""The attention layers of diffusers, whose attention a processor computes."""
