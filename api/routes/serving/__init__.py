"""Prediction with served models."""
