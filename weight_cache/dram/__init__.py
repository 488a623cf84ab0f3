"""From NVMe to DRAM: reads leased files ahead into the kernel's page cache. Nothing here evicts
from DRAM: the kernel reclaims the pages."""
