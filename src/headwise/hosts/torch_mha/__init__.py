"""torch.nn.MultiheadAttention, alone and inside torch's encoder and decoder layers."""
