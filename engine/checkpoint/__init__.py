"""Checkpoints: files, contents, saving in the background, retention, imported weights."""
