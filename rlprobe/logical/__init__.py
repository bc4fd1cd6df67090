"""What a tensor is called in the Hugging Face model, and which part of that one it is.

The one place that knows Megatron's, PEFT's and the engines' spellings and their fused projections;
plain Python, so that capture inside vendors' images and analysis read the same tables.
"""
