"""Any module that calls `torch.nn.functional.scaled_dot_product_attention`."""
