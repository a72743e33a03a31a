"""The native interface: sessions as resources, turns as transactions on them."""
