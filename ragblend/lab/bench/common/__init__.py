"""What every benchmark needs: workloads, the hardware card, output and plots."""
