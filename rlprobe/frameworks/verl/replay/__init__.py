"""Rollouts instead of generation."""
