"""The doctor: is this machine, and this directory, fit for offloading?"""
