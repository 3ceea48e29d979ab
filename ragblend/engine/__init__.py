"""Stored KV, fusion, and the engines that answer from it."""
