"""Replicas of an engine core in other processes, on this machine or others, behind one router."""
